"""``python -m sonic_coffea`` is ``sonic-coffea``."""

from sonic_coffea.cli import main

main()
