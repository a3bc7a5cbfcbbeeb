"""``plansmith plan``: what is asked, and the answer as data, as text and as a plot."""
