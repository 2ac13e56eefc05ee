"""What a compression costs and gains: the content of report.json, report.md and the console tables."""
