"""``python -m sglang_oscar``: the command ``oscar``."""

from sglang_oscar.cli import app

if __name__ == "__main__":
    app()
