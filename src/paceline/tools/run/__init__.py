"""Starting ranks: a script's or a function's, on torch's elastic agent."""
