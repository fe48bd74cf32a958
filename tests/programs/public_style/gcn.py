"""Graph convolutional network on a random graph with four communities; the layer is written by hand, the training is full-batch."""
import argparse
import atexit
import hashlib
import math
import random

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
import torch.optim as optim
from torch.nn.parameter import Parameter

parser = argparse.ArgumentParser()
parser.add_argument("--seed", type=int, default=42, help="Random seed.")
parser.add_argument("--epochs", type=int, default=200, help="Number of epochs to train.")
parser.add_argument("--lr", type=float, default=0.01, help="Initial learning rate.")
parser.add_argument("--weight_decay", type=float, default=5e-4, help="Weight decay (L2 loss on parameters).")
parser.add_argument("--hidden", type=int, default=16, help="Number of hidden units.")
parser.add_argument("--dropout", type=float, default=0.5, help="Dropout rate (1 - keep probability).")
parser.add_argument("--nodes", type=int, default=800, help="Number of nodes of the graph.")
args = parser.parse_args()

random.seed(args.seed)
np.random.seed(args.seed)
torch.manual_seed(args.seed)


@atexit.register
def _show_generators():
    digest = hashlib.sha256()
    digest.update(repr(random.getstate()).encode())
    digest.update(np.random.get_state()[1].tobytes())
    digest.update(bytes(torch.get_rng_state().tolist()))
    print("generators:", digest.hexdigest())


class GraphConvolution(nn.Module):
    """Simple GCN layer, similar to https://arxiv.org/abs/1609.02907"""

    def __init__(self, in_features, out_features, bias=True):
        super(GraphConvolution, self).__init__()
        self.in_features = in_features
        self.out_features = out_features
        self.weight = Parameter(torch.FloatTensor(in_features, out_features))
        if bias:
            self.bias = Parameter(torch.FloatTensor(out_features))
        else:
            self.register_parameter("bias", None)
        self.reset_parameters()

    def reset_parameters(self):
        stdv = 1.0 / math.sqrt(self.weight.size(1))
        self.weight.data.uniform_(-stdv, stdv)
        if self.bias is not None:
            self.bias.data.uniform_(-stdv, stdv)

    def forward(self, input, adj):
        support = torch.mm(input, self.weight)
        output = torch.spmm(adj, support)
        if self.bias is not None:
            return output + self.bias
        return output

    def __repr__(self):
        return self.__class__.__name__ + " (" + str(self.in_features) + " -> " + str(self.out_features) + ")"


class GCN(nn.Module):
    def __init__(self, nfeat, nhid, nclass, dropout):
        super(GCN, self).__init__()
        self.gc1 = GraphConvolution(nfeat, nhid)
        self.gc2 = GraphConvolution(nhid, nclass)
        self.dropout = dropout

    def forward(self, x, adj):
        x = F.relu(self.gc1(x, adj))
        x = F.dropout(x, self.dropout, training=self.training)
        x = self.gc2(x, adj)
        return F.log_softmax(x, dim=1)


def load_data(nodes, nclass=4, nfeat=200):
    """A stochastic block model; the features are words, some of them more frequent in one community."""
    labels = np.random.randint(nclass, size=nodes)
    same = labels[:, None] == labels[None, :]
    upper = np.triu(np.random.rand(nodes, nodes) < np.where(same, 0.02, 0.003), 1)
    adjacency = (upper | upper.T).astype(np.float32) + np.eye(nodes, dtype=np.float32)
    adjacency /= adjacency.sum(1, keepdims=True)
    rates = np.full((nclass, nfeat), 0.02)
    for c in range(nclass):
        rates[c, c::8] = 0.05
    features = (np.random.rand(nodes, nfeat) < rates[labels]).astype(np.float32)
    features /= np.maximum(features.sum(1, keepdims=True), 1)
    order = np.random.permutation(nodes)
    split = [torch.from_numpy(order[a:b]) for a, b in ((0, 140), (140, 340), (340, nodes))]
    return torch.from_numpy(adjacency).to_sparse(), torch.from_numpy(features), torch.from_numpy(labels), *split


def accuracy(output, labels):
    return (output.max(1)[1] == labels).double().mean()


adj, features, labels, idx_train, idx_val, idx_test = load_data(args.nodes)
model = GCN(nfeat=features.shape[1], nhid=args.hidden, nclass=labels.max().item() + 1, dropout=args.dropout)
optimizer = optim.Adam(model.parameters(), lr=args.lr, weight_decay=args.weight_decay)
print(model)


def train(epoch):
    model.train()
    optimizer.zero_grad()
    output = model(features, adj)
    loss_train = F.nll_loss(output[idx_train], labels[idx_train])
    acc_train = accuracy(output[idx_train], labels[idx_train])
    loss_train.backward()
    optimizer.step()

    # Evaluate validation set performance separately, deactivates dropout during validation run.
    model.eval()
    output = model(features, adj)
    loss_val = F.nll_loss(output[idx_val], labels[idx_val])
    acc_val = accuracy(output[idx_val], labels[idx_val])
    if (epoch + 1) % 20 == 0:
        print("Epoch: {:04d}".format(epoch + 1),
              "loss_train: {:.4f}".format(loss_train.item()),
              "acc_train: {:.4f}".format(acc_train.item()),
              "loss_val: {:.4f}".format(loss_val.item()),
              "acc_val: {:.4f}".format(acc_val.item()))


def test():
    model.eval()
    output = model(features, adj)
    loss_test = F.nll_loss(output[idx_test], labels[idx_test])
    print("Test set results:", "loss= {:.4f}".format(loss_test.item()),
          "accuracy= {:.4f}".format(accuracy(output[idx_test], labels[idx_test]).item()))
    np.savetxt("predictions.txt", output.argmax(1).numpy(), fmt="%d")


for epoch in range(args.epochs):
    train(epoch)
print("Optimization Finished!")
test()
torch.save(model.state_dict(), "gcn.pkl")
_show_generators()
