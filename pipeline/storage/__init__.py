"""Storage: atomic writes, locks, detection of file formats, guards for untrusted files."""
