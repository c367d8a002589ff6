"""One module per kind of fault; each scenario is a function of a stage and an effort."""
