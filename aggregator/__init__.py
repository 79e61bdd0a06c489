"""msprobe-aggregate: compare each rank with a trusted run, merge the ranks, name the first culprit.

Needs no training framework; runs on a login node.
"""
