package kproxy.tools;

import java.io.FilterOutputStream;
import java.io.OutputStream;
import java.io.DataOutputStream;
import java.io.IOException;
import java.util.ArrayList;
import java.util.List;

/** Stands for DataOutputStream in a class that was loaded by Renamed: notes what is written, of which type, and by which code. */
public final class Noted extends FilterOutputStream {
    /** Type, value, and the places in the code that led to the call: the same in each turn of a loop. */
    public record Call(String type, String value, String place) { }

    static final List<Call> calls = new ArrayList<>();
    private final DataOutputStream data;

    public Noted(OutputStream out) {
        super(out);
        data = new DataOutputStream(out);
    }

    private static void note(String type, Object value) {
        String place = StackWalker.getInstance().walk(frames -> frames.skip(2)
            .map(frame -> frame.getMethodName() + ":" + frame.getByteCodeIndex())
            .takeWhile(frame -> !frame.startsWith("encode:"))
            .reduce("", (before, frame) -> frame + "/" + before));
        calls.add(new Call(type, String.valueOf(value), place + direct()));
    }

    /** Of a call from encode itself the byte code's index is the place. */
    private static String direct() {
        return StackWalker.getInstance().walk(frames -> frames
            .filter(frame -> frame.getMethodName().equals("encode"))
            .map(frame -> "encode:" + frame.getByteCodeIndex()).findFirst().orElse(""));
    }

    public void writeInt(int value) throws IOException {
        note("int32", value);
        data.writeInt(value);
    }

    public void writeLong(long value) throws IOException {
        note("int64", value);
        data.writeLong(value);
    }

    public void writeShort(int value) throws IOException {
        note("int16", value);
        data.writeShort(value);
    }

    public void writeByte(int value) throws IOException {
        note("int8", value);
        data.writeByte(value);
    }

    /** Two bytes of length and UTF-8, as Kafka's own strings are. */
    public void writeUTF(String value) throws IOException {
        note("string", value);
        data.writeUTF(value);
    }

    public void writeChars(String value) throws IOException {
        note("chars", value);
        data.writeChars(value);
    }
}
