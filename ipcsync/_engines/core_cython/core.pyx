# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, embedsignature=True
# cython: freethreading_compatible=True, binding=False
"""The compiled core: the base classes of engines, points and events, and the shortcuts of record, wait, query and synchronize.

A shortcut takes the steps of the Python engine, in its order and over the same words and attributes; or it changes
nothing and says "not me", and the Python engine begins anew. So it leaves all that is rare to that one: errors, full
rings, captures, default streams, other kernels, interrupted records. Only if the driver refuses what the stream may have
all the same does it raise the driver's error itself: begun anew, a record would take a second number. Each access to a word of the board, each lock,
wake, sleep and driver call goes through a function that first looks at `hook`, which is null but in tests.

One extension of these parts, in this order, each of which needs only those before it.
"""

INTERFACE = 15  # as in `compiled`

include "words.pxi"    # the board's words
include "steps.pxi"    # the names of the steps, and the hook
include "driver.pxi"   # the driver's functions
include "parking.pxi"  # waits of the host
include "locks.pxi"    # the locks
include "session.pxi"  # whether a session can be used
include "streams.pxi"  # anybody's stream
include "slot.pxi"     # an engine's state, and each step taken on it
include "queries.pxi"  # query and synchronize
include "waits.pxi"    # wait
include "chains.pxi"   # what a record stands behind
include "records.pxi"  # record
include "users.pxi"    # what users hold
