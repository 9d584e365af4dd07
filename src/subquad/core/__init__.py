"""What everything else stands on: options and specs, tables of names, files, memory. Imports nothing of subquad."""
