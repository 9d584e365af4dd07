"""The explorer: one HTML file that needs nothing else, to see who attends to whom.

    patterns   every registered mechanism over a grid of its options: its sets, its summaries, its hop sets, its cost
    trained    the effective weights of a trained run on a text: layer, head and token by token

Everything that the page shows is computed here and embedded in it; the page draws. `page` puts the parts together,
`assets` has its scripts and styles.
"""
