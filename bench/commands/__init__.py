"""The commands of `ngn-bench`: each file has the options of one, and what it prints and writes."""
