"""One name for three things: the attention function, the mechanism inside a layer, the record in the config."""

NAME = "subquad"
