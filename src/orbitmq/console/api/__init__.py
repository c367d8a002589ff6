"""The console's HTTP interface, version 1: JSON over `/api/v1/`, one module per subject."""
