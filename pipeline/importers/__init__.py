"""Importers: model files of any format become a torch module with what the file records."""
