package kproxy.tools;

import java.io.ByteArrayInputStream;
import java.io.ByteArrayOutputStream;
import java.io.DataInputStream;
import java.io.DataOutputStream;
import java.io.IOException;
import java.io.InputStream;

/** Loads the classes of a package with one class's name in their constant pools replaced by another's. */
final class Renamed extends ClassLoader {
    private final String prefix;
    private final String from;
    private final String to;

    Renamed(String prefix, String from, String to) {
        super(Renamed.class.getClassLoader());
        this.prefix = prefix;
        this.from = from;
        this.to = to;
    }

    @Override
    protected Class<?> loadClass(String name, boolean resolve) throws ClassNotFoundException {
        if (!name.startsWith(prefix)) return super.loadClass(name, resolve);
        synchronized (getClassLoadingLock(name)) {
            Class<?> found = findLoadedClass(name);
            if (found != null) return found;
            try (InputStream in = getParent().getResourceAsStream(name.replace('.', '/') + ".class")) {
                if (in == null) throw new ClassNotFoundException(name);
                byte[] bytes = renamed(in.readAllBytes());
                return defineClass(name, bytes, 0, bytes.length);
            } catch (IOException e) {
                throw new ClassNotFoundException(name, e);
            }
        }
    }

    /** The constant pool is all that has names (JVM specification, section 4.4); nothing in a class file is at a fixed place. */
    private byte[] renamed(byte[] given) throws IOException {
        var in = new DataInputStream(new ByteArrayInputStream(given));
        var bytes = new ByteArrayOutputStream();
        var out = new DataOutputStream(bytes);
        out.writeLong(in.readLong()); // magic and versions
        int count = in.readUnsignedShort();
        out.writeShort(count);
        for (int i = 1; i < count; i++) {
            int tag = in.readUnsignedByte();
            out.writeByte(tag);
            switch (tag) {
                case 1 -> out.writeUTF(in.readUTF().replace(from, to));
                case 3, 4, 9, 10, 11, 12, 17, 18 -> out.writeInt(in.readInt());
                case 5, 6 -> {
                    out.writeLong(in.readLong());
                    i++; // takes two places
                }
                case 7, 8, 16, 19, 20 -> out.writeShort(in.readUnsignedShort());
                case 15 -> {
                    out.writeByte(in.readUnsignedByte());
                    out.writeShort(in.readUnsignedShort());
                }
                default -> throw new IOException("constant " + tag);
            }
        }
        in.transferTo(out);
        return bytes.toByteArray();
    }
}
