"""What a finished batch's gradients become: sums over ranks, norms, loss scales, and the delayed update."""
