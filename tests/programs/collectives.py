"""Every kind of collective once, on two ranks with gloo; rank r contributes r + 1."""

import torch
import torch.distributed as dist
from torch import nn

dist.init_process_group("gloo")
rank = dist.get_rank()
group = dist.new_group([0, 1])
mine = torch.ones(4) * (rank + 1)
nn.Linear(2, 2)(torch.ones(1, 2)).sum().backward()  # opens the step

dist.all_reduce(mine.clone())
dist.all_reduce(mine.clone(), op=dist.ReduceOp.MAX, group=group)
waited = mine.clone()
print("WAIT", dist.all_reduce(waited, async_op=True).wait())
polled = mine.clone()
work = dist.all_reduce(polled, async_op=True)
while not work.is_completed():
    pass
dist.broadcast(mine.clone(), src=1)
dist.all_gather([torch.full((4,), 77.0) for _ in range(2)], mine)
dist.reduce_scatter(torch.full((2,), 77.0), [mine[:2].clone(), mine[2:].clone()])
if rank == 0:
    dist.send(torch.ones(3), 1)
else:
    dist.recv(torch.full((3,), 77.0), 0)
peer = 1 - rank
operations = [dist.P2POp(dist.isend, mine, peer), dist.P2POp(dist.irecv, torch.full((4,), 77.0), peer)]
for pending in dist.batch_isend_irecv(operations):
    pending.wait()
objects = [None, None]
dist.all_gather_object(objects, {"rank": rank})
dist.barrier()
dist.destroy_process_group()
