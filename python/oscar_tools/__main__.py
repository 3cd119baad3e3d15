"""``python -m oscar_tools``: the command ``oscar``."""

from oscar_tools.cli import app

if __name__ == "__main__":
    app()
