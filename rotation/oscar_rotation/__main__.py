"""``python -m oscar_rotation``: the commands of this package on their own."""

from oscar_rotation.cli import app

if __name__ == "__main__":
    app()
