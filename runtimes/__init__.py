"""Run, verify and time what the exporters wrote. Nothing here needs torch."""
