"""Comparison of two runs whose ranks divide the model in different ways (docs/layouts.md).

spec.py      the layout file: which rank is what, and how values are divided
infer.py     the same from what the dumps say
gather.py    dumps of the ranks that make one model -> rows side by side
pairing.py   which call of one rank is which call of another, or of the bench
decide.py    how each row is divided: by the file, by its placements, by its shapes
combine.py   statistics of the whole from those of the parts
shards.py    stored values of the whole, read from the parts
compare.py   one combined rank against another: an ordinary comparison
"""
