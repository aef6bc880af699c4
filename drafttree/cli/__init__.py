"""The `drafttree` command."""
