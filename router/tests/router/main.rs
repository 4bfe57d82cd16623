//! Tests of the router over real sockets, in front of minimal agents.

#[cfg(test)]
mod agent;
mod blocks;
#[cfg(test)]
mod harness;
#[cfg(test)]
mod lifecycle;
#[cfg(test)]
mod preamble;
#[cfg(test)]
mod turns;
