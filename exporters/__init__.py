"""Writers of portable files from a lowered graph."""
