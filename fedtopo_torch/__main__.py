"""``python -m fedtopo_torch`` is ``fedtopo``."""

from .cli import main

if __name__ == "__main__":
    main()
