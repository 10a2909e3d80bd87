"""A GPU whose streams take any time they like, simulated on a CPU.

Every operation computes at once, as always on a CPU. What is simulated is when a GPU might run it: after what its
stream was given before, after the events and transfers that the stream was told to wait for, after what the host had
seen the end of when it launched it, and after nothing else. From that follow two things that a run on a CPU cannot
show: which results would be luck (``order``), and whether ranks could wait for each other for ever (``progress``).

Transfers and collectives are those of NCCL: each pair of ranks and each group has a stream, which waits for the one
that calls; a send is not done before its receive; ``wait`` makes the caller's stream wait, and no host. Groups that
are on the host everywhere stay there.
"""
