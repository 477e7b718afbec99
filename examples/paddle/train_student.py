"""Trains the student on the teachers' predictions, with however many trainers are running."""

import argparse
import time

import digits
import nets
import paddle

from edl.collective import ElasticSampler
from edl.collective.paddle import Checkpointer, PaddleState, init_parallel_env
from edl.distill.paddle import distill
from edl.distill.paddle_losses import kl_divergence

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--teachers", default="digits", help="a service, or the teachers' host:port (default: digits)")
parser.add_argument("--store", "--discovery", help="URL of the store (default: EDL_DISCOVERY, or a local file)")
parser.add_argument("--epochs", type=int, default=40)
parser.add_argument("--pause", type=float, default=0.0, help="seconds to wait in each step, so that you can watch")
options = parser.parse_args()

init_parallel_env()  # like paddle.distributed.init_parallel_env
world = paddle.distributed.get_world_size()
first = paddle.distributed.get_rank() == 0

paddle.seed(0)
train, test = digits.load()
model = nets.student()
optimizer = paddle.optimizer.Adam(5e-3, parameters=model.parameters())
sampler = ElasticSampler(len(train), global_batch=64, seed=0)

state = PaddleState(model=model, optimizer=optimizer, sampler=sampler, step=-1)
checkpointer = Checkpointer(state)
checkpointer.restore()  # the step where training stopped, -1 at the beginning
if first:
    print(f"{world} trainers go on after step {state.step} in epoch {sampler.epoch + 1}", flush=True)

network = paddle.DataParallel(model) if world > 1 else model
loader = paddle.io.DataLoader(train, batch_sampler=sampler)
with distill(loader, options.teachers, inputs=["image", None], outputs="logits", discovery=options.store) as labelled:
    for epoch in sampler.epochs(options.epochs):
        model.train()
        for (images, _), logits in labelled:
            rows, of = sampler.share_rows, sampler.batch_samples
            losses = kl_divergence(network(images), logits, temperature=4.0, reduction="none")
            loss = losses[:rows].sum() * (world / of)  # the mean over trainers is the mean over the global batch
            loss.backward()
            optimizer.step()
            optimizer.clear_grad()
            time.sleep(options.pause)
            sampler.advance()
            state.step += 1
            checkpointer.save(state.step, samples=rows)
        if first and epoch % 10 == 9:
            print(f"epoch {epoch + 1}: {digits.accuracy(model, test):.1%} right, {labelled.stats().line()}", flush=True)
if first:
    print(f"student: {digits.accuracy(model, test):.1%} right")
