"""Studies: experiments of the papers that run as one command, write their results as they go and draw the figure."""
