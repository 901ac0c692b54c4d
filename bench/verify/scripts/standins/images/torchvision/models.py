"""A residual network and one of VGG's kind, both small, under their modules' names."""

from collections import namedtuple

import torch
from torch import nn


class Block(nn.Module):
    def __init__(self, wide, out, stride):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(wide, out, 3, stride, 1, bias=False), nn.BatchNorm2d(out)
        self.conv2, self.bn2 = nn.Conv2d(out, out, 3, 1, 1, bias=False), nn.BatchNorm2d(out)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = None
        if stride != 1 or wide != out:
            self.downsample = nn.Sequential(nn.Conv2d(wide, out, 1, stride, bias=False), nn.BatchNorm2d(out))

    def forward(self, x):
        y = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        return self.relu(y + (x if self.downsample is None else self.downsample(x)))


class ResNet(nn.Module):
    """Filters 64, as scripts that replace the first convolution have it, then 16."""

    def __init__(self, num_classes=1000):
        super().__init__()
        self.conv1, self.bn1, self.relu = nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(3, 2, 1)
        self.layer1, self.layer2 = nn.Sequential(Block(64, 16, 1), Block(16, 16, 1)), nn.Sequential(Block(16, 32, 2), Block(32, 32, 1))
        self.avgpool, self.fc = nn.AdaptiveAvgPool2d((1, 1)), nn.Linear(32, num_classes)

    def forward(self, x):
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        return self.fc(torch.flatten(self.avgpool(self.layer2(self.layer1(x))), 1))


class VGG16_Weights:
    IMAGENET1K_V1 = None


def resnet18(weights=None, pretrained=False, **kwargs):
    return ResNet(**kwargs)


resnet50 = resnet18


def vgg16(weights=None, pretrained=False):
    """Its features alone: 31 modules, 4 to 32 filters."""
    wide, modules = 3, []
    for out, count in ((4, 2), (8, 2), (16, 3), (32, 3), (32, 3)):
        for _ in range(count):
            modules += [nn.Conv2d(wide, out, 3, padding=1), nn.ReLU(inplace=True)]
            wide = out
        modules.append(nn.MaxPool2d(2))
    return namedtuple("VGG", "features")(nn.Sequential(*modules))
