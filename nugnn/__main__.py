"""``python -m nugnn`` is the ``nugnn`` command; so is ``torchrun -m nugnn``."""

from nugnn.cli import main

if __name__ == "__main__":
    main()
