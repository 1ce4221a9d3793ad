"""A published model, as the page takes it for given."""

import torch

import multiverso as mv

model = torch.nn.Linear(3, 2)
publication = mv.Publication("policy", like=model)
publication.publish(model)
