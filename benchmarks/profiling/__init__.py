"""Where the time goes on the hot paths: `make profile`."""
