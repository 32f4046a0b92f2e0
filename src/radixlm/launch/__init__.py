"""Starting and ending processes."""
