"""The order in which numbers are added: one for all backends, threads and batches, so that a sum has one result in fp64.

A row is cut into *pieces* of :data:`PIECE` elements. Of a piece, lane ``l`` adds the elements ``l, l + LANES, ...`` in
order, then neighbouring lanes are added until one is left. The pieces' sums are a vector that is summed in the same way. The
sum of all elements is that of the rows' sums, in the same way again. A column is cut into *strips* of :data:`STRIP` rows,
which are added in order; the strips' sums are rows that are summed in the same way.
"""

PIECE = 1024
LANES = 32
STRIP = 64
