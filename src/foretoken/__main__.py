"""``python -m foretoken``."""

from foretoken.cli import main

main()
