"""`python -m subquad`: the same as the command `subquad`."""

from subquad.cli import main

main()
