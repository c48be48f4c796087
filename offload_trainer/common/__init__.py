"""Errors and their exit codes, bounded reading of files, units, standard streams and versions, for every layer."""
