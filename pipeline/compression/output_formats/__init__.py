"""Output formats of a compressed network behind one interface, registered in ``registry``."""
