"""Redistributions as values: the blocks that every rank sends to every other rank.

`exchange` redistributes from any layout to any layout and, with lists of indices, moves rows and columns in any order;
it also redistributes from the local arrays of a grid that has lost some of its ranks.  `rectangle_exchange`
redistributes between a layout and rectangles that the ranks hold, or moves rows to the ranks that own their groups, and
back.  All derive from `block_messages`: ranks send to ranks, or two nodes exchange one message.
"""
