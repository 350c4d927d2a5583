"""``python cli.py train --algo ptopofl``: the command line from a checkout."""

from fedtopo_torch.cli import main

if __name__ == "__main__":
    main()
