"""Everything knotctl does, without a command line and without HTTP."""
