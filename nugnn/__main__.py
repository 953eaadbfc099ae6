"""``python -m nugnn``: the ``nugnn`` command."""

from nugnn.cli import main

main()
