"""Advice: what each mechanism would cost on this machine, whom it reaches, and what is known of its quality.

points        which layers are measured, and the file that keeps what was measured
measuring     the times of a calibration: a layer's forward pass, training step and decode step
peaks         its memory, each measurement in a process of its own
curves        from measured points to a function of length, heads, width and batch size
costs         the cost model: a file of points → time and memory of any layer
reach         theory: in how many layers every token reaches every other
quality       what committed results say
ranking       a wish → mechanisms in order, or the nearest possible wishes
"""
