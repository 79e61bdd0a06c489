"""Comparison of two runs whose ranks divide the model in different ways (docs/layouts.md).

spec.py           the layout file: which rank is what, and how values are divided
infer.py          the same from what the dumps say
plan.py           which ranks become one, step by step
gather.py         dumps of the ranks that make one model -> rows side by side
pairing.py        which call of one rank is which call of another, or of the bench
stages.py         pipeline stages as one model: names, and the order in which they ran
decide.py         how each row is divided: by the file, by its placements, by its shapes
combine.py        statistics of the whole from those of the parts
together.py       one side's rows put together, and replicas that differ
judge.py          what can be compared, and what was found on the way
shards.py         stored values of the whole, read from the parts
whole_values.py   metrics of these
tables.py         the partition and its words
compare.py        one combined rank against another: an ordinary comparison
"""
