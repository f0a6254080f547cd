//! The system calls on sockets: the only unsafe code of the core.

use std::io::{Error, ErrorKind};
use std::mem;

pub fn monotonic_ns() -> i64 {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: `time` is a valid timespec.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &mut time) };
    time.tv_sec as i64 * 1_000_000_000 + time.tv_nsec as i64
}

/// The outcome of a call that does not wait.
pub enum Io {
    Done(usize),
    Later,
    Failed(i32),
}

fn outcome(result: isize) -> Io {
    if result >= 0 {
        return Io::Done(result as usize);
    }
    let error = Error::last_os_error();
    match error.kind() {
        ErrorKind::WouldBlock | ErrorKind::Interrupted => Io::Later,
        _ => Io::Failed(error.raw_os_error().unwrap_or(libc::EIO)),
    }
}

pub fn receive(fd: i32, buffer: &mut [u8]) -> Io {
    // SAFETY: the kernel writes at most buffer.len() bytes to the buffer.
    outcome(unsafe { libc::recv(fd, buffer.as_mut_ptr().cast(), buffer.len(), 0) })
}

/// Receives bytes, and the kernel's wall-clock time of their arrival in nanoseconds if the socket has timestamps.
pub fn receive_timed(fd: i32, buffer: &mut [u8]) -> (Io, Option<i64>) {
    let mut control = [0u64; 16];
    let mut part = libc::iovec { iov_base: buffer.as_mut_ptr().cast(), iov_len: buffer.len() };
    // SAFETY: a msghdr of zeros is valid; it refers to one buffer and one control buffer, both alive during the call.
    let mut message: libc::msghdr = unsafe { mem::zeroed() };
    message.msg_iov = &mut part;
    message.msg_iovlen = 1;
    message.msg_control = control.as_mut_ptr().cast();
    message.msg_controllen = mem::size_of_val(&control) as _;
    // SAFETY: as above.
    let result = outcome(unsafe { libc::recvmsg(fd, &mut message, 0) });
    let mut wall_ns = None;
    // SAFETY: the macros walk the control data that the kernel wrote, within msg_controllen.
    unsafe {
        let mut header = libc::CMSG_FIRSTHDR(&message);
        while !header.is_null() {
            if (*header).cmsg_level == libc::SOL_SOCKET && (*header).cmsg_type == libc::SCM_TIMESTAMPNS {
                let time: libc::timespec = std::ptr::read_unaligned(libc::CMSG_DATA(header).cast());
                wall_ns = Some(time.tv_sec as i64 * 1_000_000_000 + time.tv_nsec as i64);
            }
            header = libc::CMSG_NXTHDR(&message, header);
        }
    }
    (result, wall_ns)
}

pub fn send(fd: i32, bytes: &[u8]) -> Io {
    // SAFETY: the kernel reads bytes.len() bytes.
    outcome(unsafe { libc::send(fd, bytes.as_ptr().cast(), bytes.len(), libc::MSG_NOSIGNAL) })
}
