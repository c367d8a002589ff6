"""Administration: what operators, the command line and the console do with a cluster."""
