"""What every layer uses: errors and their exit codes, bounded reading of files, units, standard streams, versions."""
