"""`shardkeep bench`: what saves and loads cost on this machine, as ratios to the hardware and to peers.

    main       options -> sections -> table or JSON, exit code
    speed      GB/s, stall and peak memory of every contestant: ours, peers (`peers.py`), ceilings (`bare.py`)
    memory     host memory of a synchronous save, and of fifty in a row
    planning   what planning and coordination cost at eight ranks
    small      tens of thousands of small tensors
    beside     step times of a training loop beside a lazy save
    rows       the design's goals, and whether they were reached

Sits at the edge, like the demo: uses shardkeep's public API alone, and may start rank processes.
"""
