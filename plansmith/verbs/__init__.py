"""One module per verb of the command, each imported only when it is run."""
