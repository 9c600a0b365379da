"""Starting engines: in this process, or in children of their own."""
