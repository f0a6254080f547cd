//! The bytes of one direction of a captured connection: its segments, in order, read as one text.

use std::cmp::min;

use pyo3::buffer::ReadOnlyCell;

/// The segments of a window, by column: side, first byte and the one behind the last in the window, time.
pub struct Segments<'a> {
    pub window: &'a [ReadOnlyCell<u8>],
    pub side: &'a [i64],
    pub start: &'a [i64],
    pub end: &'a [i64],
    pub time_ns: &'a [i64],
}

impl Segments<'_> {
    /// Whether all are bytes of the window.
    pub fn are_sound(&self) -> bool {
        let count = self.side.len();
        let is_even = self.start.len() == count && self.end.len() == count && self.time_ns.len() == count;
        let size = self.window.len();
        let mut ends = self.start.iter().zip(self.end);
        is_even && ends.all(|(start, end)| *start >= 0 && start <= end && *end as usize <= size)
    }
}

/// A position in a direction.
#[derive(Clone, Copy)]
pub struct Rope<'a> {
    segments: &'a Segments<'a>,
    side: i64,
    segment: usize,
    high: usize, // behind the last segment
    at: usize,   // in the window
    left: usize, // bytes that may be read
}

impl<'a> Rope<'a> {
    /// The direction of a side, from segment `low` to the one before `high`.
    pub fn new(segments: &'a Segments<'a>, side: usize, low: usize, high: usize) -> Self {
        let at = segments.start.get(low).map_or(0, |start| *start as usize);
        let mut rope = Rope { segments, side: side as i64, segment: low, high, at, left: usize::MAX };
        if low < high && segments.side[low] != rope.side {
            rope.at = segments.end[low] as usize;
        }
        rope
    }

    pub fn left(&self) -> usize {
        self.left
    }

    /// The same position, with an end after this many bytes.
    pub fn cut(mut self, size: usize) -> Self {
        self.left = min(self.left, size);
        self
    }

    /// Goes to the segment of the next byte, and returns how many bytes are left in it; 0: there is no byte left.
    fn enter(&mut self) -> usize {
        let segments = self.segments;
        let mut next = self.segment;
        while next < self.high {
            if segments.side[next] == self.side {
                let at = if next == self.segment { self.at } else { segments.start[next] as usize };
                let end = segments.end[next] as usize;
                if at < end {
                    self.segment = next;
                    self.at = at;
                    return end - at;
                }
            }
            next += 1;
        }
        0
    }

    /// The segment of the next byte and the byte's offset in it; None: there is none.
    pub fn place(mut self) -> Option<(usize, usize)> {
        (self.enter() > 0).then(|| (self.segment, self.at - self.segments.start[self.segment] as usize))
    }

    /// The segment of the byte that is `ahead` of the next one.
    pub fn segment(mut self, ahead: usize) -> Option<usize> {
        self.skip(ahead)?;
        self.place().map(|(segment, _)| segment)
    }

    pub fn skip(&mut self, count: usize) -> Option<()> {
        self.left = self.left.checked_sub(count)?;
        let mut count = count;
        while count > 0 {
            let step = min(self.enter(), count);
            if step == 0 {
                return None;
            }
            self.at += step;
            count -= step;
        }
        Some(())
    }

    pub fn fill(&mut self, bytes: &mut [u8]) -> Option<()> {
        self.left = self.left.checked_sub(bytes.len())?;
        let mut filled = 0;
        while filled < bytes.len() {
            let step = min(self.enter(), bytes.len() - filled);
            if step == 0 {
                return None;
            }
            let found = &self.segments.window[self.at..self.at + step];
            for (byte, cell) in bytes[filled..filled + step].iter_mut().zip(found) {
                *byte = cell.get();
            }
            filled += step;
            self.at += step;
        }
        Some(())
    }

    pub fn byte(&mut self) -> Option<u8> {
        let mut byte = [0];
        self.fill(&mut byte)?;
        Some(byte[0])
    }

    /// A signed integer of 1, 2, 4 or 8 bytes.
    pub fn number(&mut self, size: usize) -> Option<i64> {
        let mut bytes = [0; 8];
        self.fill(&mut bytes[8 - size..])?;
        let unused = 8 * (8 - size) as u32;
        Some(i64::from_be_bytes(bytes) << unused >> unused)
    }

    /// An unsigned varint of at most five bytes and 32 bits.
    pub fn uvarint(&mut self) -> Option<u32> {
        let mut value: u64 = 0;
        for shift in [0, 7, 14, 21, 28] {
            let byte = self.byte()?;
            value |= u64::from(byte & 0x7f) << shift;
            if byte < 0x80 {
                return u32::try_from(value).ok();
            }
        }
        None
    }

    /// A length or count; Some(None) is null. width: of the number in bytes; 0: a varint, the length plus one.
    pub fn length(&mut self, width: u32) -> Option<Option<usize>> {
        let length = match width {
            0 => i64::from(self.uvarint()?) - 1,
            _ => self.number(width as usize)?,
        };
        Some(usize::try_from(length).ok())
    }

    /// Passes the next bytes if they are these; else the position is anywhere.
    pub fn begins_with(&mut self, bytes: &[u8]) -> bool {
        let mut rest = bytes;
        while !rest.is_empty() {
            let step = min(min(self.enter(), rest.len()), self.left);
            let found = &self.segments.window[self.at..self.at + step];
            if step == 0 || rest.iter().zip(found).any(|(byte, cell)| *byte != cell.get()) {
                return false;
            }
            self.at += step;
            self.left -= step;
            rest = &rest[step..];
        }
        true
    }
}
