"""Reports: a finished comparison as one page to read, print and send."""
