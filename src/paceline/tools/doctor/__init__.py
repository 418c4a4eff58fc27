"""What is wrong with a host, or among ranks: facts gathered in thin code and judged in pure code."""
