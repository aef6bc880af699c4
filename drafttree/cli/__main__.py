"""`python -m drafttree.cli`, for programs that start Python themselves."""

from drafttree.cli import app

app()
